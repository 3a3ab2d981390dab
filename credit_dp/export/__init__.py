"""A trained model as one plain file, and back as a model between physical fields."""
