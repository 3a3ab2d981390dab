"""The physics of forecasts: columns of air, fixers of budgets, and derived fields."""
