"""Training and racing: a recipe with a method on workers, and methods against each other."""
