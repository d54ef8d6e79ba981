"""Commands about decisions: to make one, and to find out why it was made."""
