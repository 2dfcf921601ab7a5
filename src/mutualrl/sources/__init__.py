"""Sources: members of the pool that publish rollouts and never learn.

`source.Source` is what the training round needs of one. A kind of source is a module here: `recorded` reads files.
Sources know tasks, tokenizers and the record of a rollout; they know nothing of trainers and processes.
"""
