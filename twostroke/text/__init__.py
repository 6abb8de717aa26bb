"""From token ids to text and back: tokenizer, chat template, detokenizer, delivery. May import request; no torch."""
