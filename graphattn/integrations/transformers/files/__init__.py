"""Changed models as files: saved whole or not at all, and made again."""
