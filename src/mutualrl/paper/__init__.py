"""The paper's evidence: its diagnostics, THL suites, and distillation. It imports the others; only the command line
imports it."""
