"""What the tests of the documentation share: a page's blocks, and how each kind of block is run."""
