"""Floor 4: prepare, regenerate, extract, train, evaluate, export; siblings never import each other."""
