"""`horovodrun` and `run`: hosts, slots, the processes of a run and their output."""
