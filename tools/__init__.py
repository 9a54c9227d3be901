"""Command lines around minitf: they import it, it never imports them."""
