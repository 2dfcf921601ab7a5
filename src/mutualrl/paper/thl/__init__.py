"""`thl-check`: whether two models can exchange traces, by their tokenizers and by the paper's five tables."""
