"""`llmcli attention`: what heads attend to."""
