"""How all pictures of the project look: their fonts, their colours, their captions, and the files they become."""
