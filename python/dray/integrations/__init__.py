"""Plug-ins for frameworks, which find them by their entry points."""
