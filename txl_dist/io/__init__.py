"""Files: atomic writes, manifests, tensors, the Hugging Face Hub."""
