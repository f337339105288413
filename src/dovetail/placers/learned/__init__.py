"""Learned placers: RL17's seq2seq, HDP and GDP. One file per idea."""
