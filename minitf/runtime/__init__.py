"""Services of a process: other processes, files, the terminal, devices."""
