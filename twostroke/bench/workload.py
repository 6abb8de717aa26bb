"""The eight chats of the demo and of its benchmark."""

from __future__ import annotations

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in two sentences.",
    "Write a short poem about a steam engine.",
    "How does a bicycle stay upright?",
    "Name three animals that live in the sea.",
    "Explain what a CPU does to a ten-year-old.",
    "What should I cook with potatoes and eggs?",
    "Give me a name for a small black cat, and say why.",
)

CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
