"""Trains a model: `python train.py model=unet parallel.domain=2`."""

from credit_dp.cli import train_main

if __name__ == "__main__":
    train_main()
