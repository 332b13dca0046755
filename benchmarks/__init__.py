"""How fast nbddp is, compared with other ways to do the same. Nothing is asserted."""
