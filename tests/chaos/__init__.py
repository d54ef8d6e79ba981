"""Processes are killed under load, and then the books are compared with a journal that was kept outside of them."""
