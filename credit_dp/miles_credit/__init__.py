"""Configs and models of miles-credit: what `credit-dp import credit` turns them into."""
