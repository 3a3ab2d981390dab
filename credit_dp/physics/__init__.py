"""The physics of forecasts: columns of air, and fixers that close budgets after each step."""
