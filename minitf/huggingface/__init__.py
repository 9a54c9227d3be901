"""Weights from and to Hugging Face model folders: python -m minitf.huggingface import|export FROM TO"""
