"""`llmcli attention`: what each head attends to."""
