"""From messages to text: the form that a template sees, and the template."""
