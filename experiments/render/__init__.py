"""What is drawn from the data of views, a room for each library that draws."""
