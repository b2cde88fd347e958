"""What is refused before the first update: arguments, rows, trainers with another loss, and too little memory."""
