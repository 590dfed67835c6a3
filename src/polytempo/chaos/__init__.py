"""Many faults together: the server's machines under message loss, cuts, pauses, deaths and bad disks, from a seed."""
