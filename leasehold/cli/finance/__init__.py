"""Commands for finance: usage, statements, tenants, periods and adjustments."""
