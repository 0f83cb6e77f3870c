"""Other systems' interfaces over dray: code that was written for them runs by changing its import."""
