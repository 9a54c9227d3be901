"""What a run would need and do on devices that are not here."""
