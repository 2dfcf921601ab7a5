"""Mutual reinforcement learning: several language models that train together and share experience.

The parts have the paper's names: the Shared Experience Exchange (`mutualrl.see`), the Tokenizer
Heterogeneity Layer (`mutualrl.thl`), the regimes (`mutualrl.regimes`) and the Multi-Worker Resource
Allocation (`mutualrl.mwra`).
"""

__version__ = "0.1.0"
