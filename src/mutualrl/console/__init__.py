"""Text and figures for people: cleaned, as Markdown, as plots."""
