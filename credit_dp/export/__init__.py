"""Export a trained model to one safetensors file with a model card, and load it to forecast.

`file` reads and writes the tensors and metadata, and writes the model card. `forecaster` wraps the
model so that it takes and returns fields in physical units, and has `credit_dp.load`.
"""
