"""What a run is made of on each engine and in the virtual world: its launcher, its processes, its folder."""
