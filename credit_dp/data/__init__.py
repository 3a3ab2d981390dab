"""Weather stores on disk and what a run makes of them. Takes row slices, never a mesh."""
