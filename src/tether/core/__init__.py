"""The contract between protocols and runtimes, and the data that flows between them."""
