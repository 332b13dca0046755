"""Draws a history: live in the page, as a saved picture, as lines of text."""
