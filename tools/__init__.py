"""Command-line tools: they import minitf, which never imports them."""
