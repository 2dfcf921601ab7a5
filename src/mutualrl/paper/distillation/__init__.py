"""Sequential Peer Distillation, the paper's control (Section "Online Gating versus Sequential Peer Distillation")."""
