"""`horovodrun`."""
