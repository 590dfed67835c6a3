"""The members of an elastic run, and the step that they undo or finish when a member is lost. Without I/O."""
