"""What only contributors use: digests of compiled code, and the text of a shipped table."""
