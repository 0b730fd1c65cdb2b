"""The common look of all pictures: their fonts, their colours, their captions, and the files they become."""
