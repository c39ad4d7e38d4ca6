"""A trained model behind HTTP: OpenAI's completions, memories as handles, many texts at once. Knows no training."""
