"""The accuracy gate: is what a server answers still this model?"""
