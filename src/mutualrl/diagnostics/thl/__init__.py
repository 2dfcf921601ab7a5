"""`thl-check`: can two models exchange traces? First their tokenizers alone, then the paper's five tables."""
