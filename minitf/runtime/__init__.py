"""Services of a process: coordination with other processes, files, the terminal, devices."""
