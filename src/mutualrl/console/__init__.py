"""Text and figures for display: cleaned, as Markdown, as plots."""
