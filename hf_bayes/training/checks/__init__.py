"""The checks before the first update: they refuse arguments, rows, trainers with another loss, too little memory."""
