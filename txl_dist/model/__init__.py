"""The network. It knows torch and `config.ModelSection`; it knows no data, rank or engine."""
