"""TLS of both services and of clients: contexts that follow their files, reasons in words, peers' certificates."""
