"""What a step of a configured model takes on any mesh, without ranks or data."""
